// y[token][row] of `count` rows from `first` on of a matrix. An item, or a team, has a row and TILE tokens.
SIZED __kernel void row_products(bytes matrix, bytes x, __global float *y, int first, int count,
                                 int at, int tokens ROOM) {
    Member of = member();
    int row = row_of(of), token = get_global_id(1) * TILE, here = min(TILE, tokens - token);
    // Rows beyond the last one are not read.
    uint wanted = row < count ? (1u << here) - 1 : 0;
    float out[TILE];
    bytes input = x + (size_t)token * TOKEN_BYTES;
    Row weights = row_at(matrix, first + row);
    products(weights, input, here, wanted, out, of ITS_ROOM);
    if (wanted && of.chain == 0) {
        for (int t = 0; t < here; ++t) {
            y[(size_t)at + (size_t)(token + t) * count + row] = out[t];
        }
    }
}
