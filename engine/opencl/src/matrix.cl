// y[token][row] of `count` rows of a matrix from `first` on. A work group computes a block (BLOCKS); otherwise a work item,
// or a team, computes a row for TILE tokens. Rows past the last one are not read.
#ifdef BLOCKS
__kernel void row_products(bytes matrix, bytes x, __global float *y, int first, int count,
                           int at, int tokens, __local Chain *chains) {
    Member member = this_member();
    int token = get_global_id(1) * BLOCK_TOKENS, here = min(BLOCK_TOKENS, tokens - token);
    Row rows[LANE_ROWS];
    uint read = 0;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
        int row = row_of(member, r);
        rows[r] = row_at(matrix, first + row);
        read |= (uint)(row < count) << r;
    }
    float out[ENDS];
    products(rows, read, x + (size_t)token * TOKEN_BYTES, here, out, member, chains);
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
        End end = end_at(member, k);
        int row = end_row(member, end);
        if (end.is && row < count && end.t < here) {
            y[(size_t)at + (size_t)(token + end.t) * count + row] = out[k];
        }
    }
}
#else
__kernel void row_products(bytes matrix, bytes x, __global float *y, int first, int count,
                           int at, int tokens LOCAL_PARAMS) {
    Member member = this_member();
    int row = row_of(member), token = get_global_id(1) * TILE, here = min(TILE, tokens - token);
    uint wanted = row < count ? (1u << here) - 1 : 0;
    float out[TILE];
    bytes input = x + (size_t)token * TOKEN_BYTES;
    Row weights = row_at(matrix, first + row);
    products(weights, input, here, wanted, out, member LOCAL_ARGS);
    if (wanted && member.chain == 0) {
        for (int t = 0; t < here; ++t) {
            y[(size_t)at + (size_t)(token + t) * count + row] = out[t];
        }
    }
}
#endif
