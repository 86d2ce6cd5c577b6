// Products of many tokens, where the host defines BLOCKS. A work group has a block: ITS_ROWS rows for each of its lanes, and
// BLOCK_TOKENS tokens. 16 items share a lane, and each has a chain of all its products, so that what is read is used many
// times:
//
//   item    chain item / lanes of lane item % lanes
//   row     r · lanes + lane of the group's rows, 0 ≤ r < ITS_ROWS: neighbouring lanes have neighbouring rows
//   value   ITS_ROWS · t + r of a lane: row r times token t
//
// Chains are added up in local memory, of AT_A_TIME values of all lanes at a time, in the order of all forms.

#ifdef BLOCKS

#define VALUES (ITS_ROWS * BLOCK_TOKENS)
// Values that an item adds up.
#define ENDS (VALUES / AT_A_TIME)

// An item's part of a block.
typedef struct {
    int chain, lane, lanes;
} Member;

Member member(void) {
    Member of;
    of.lanes = get_local_size(0) / CHAINS;
    of.chain = get_local_id(0) / of.lanes;
    of.lane = get_local_id(0) % of.lanes;
    return of;
}

// Row `r` of a lane, among all rows of the kernel.
int row_of(Member of, int r) {
    return (get_group_id(0) * ITS_ROWS + r) * of.lanes + of.lane;
}

// A value that an item adds up: row `r` of lane `lane`, token `t`; there may be none.
typedef struct {
    int r, lane, t;
    bool is;
} End;

// The `k`-th.
End end_at(Member of, int k) {
    End end;
    int item = get_local_id(0), value = k * AT_A_TIME + item / of.lanes;
    end.is = item < AT_A_TIME * of.lanes;
    end.lane = item % of.lanes;
    end.r = value % ITS_ROWS;
    end.t = value / ITS_ROWS;
    return end;
}

int end_row(Member of, End end) {
    of.lane = end.lane;
    return row_of(of, end.r);
}

// The sum of 16 chains of a lane, which lie `lanes` apart.
float of_chains(__local const Chain *all, int lanes) {
    Chain sum[CHAINS / 2];
#pragma unroll
    for (int j = 0; j < CHAINS / 2; ++j) {
        sum[j] = all[j * lanes] + all[(j + CHAINS / 2) * lanes];
    }
#pragma unroll
    for (int width = CHAINS / 4; width > 0; width /= 2) {
#pragma unroll
        for (int j = 0; j < width; ++j) {
            sum[j] += sum[j + width];
        }
    }
    return of_chain(sum[0]);
}

// Multiplies the item's rows whose bits are set in `read` by `count` tokens; `out` has the values that the item adds up. All
// items of a work group call it. Rows whose bits are not set are not read, and their values are undefined.
void products(const Row *rows, uint read, bytes tokens, int count, float *out, Member of,
              __local Chain *chains) {
    Chain sum[VALUES];
    Weights w[ITS_ROWS];
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
        sum[v] = no_sum();
    }
#pragma unroll
    for (int r = 0; r < ITS_ROWS; ++r) {
        w[r] = no_weights();
    }
    for (int s = of.chain; s < STEPS; s += CHAINS) {
#pragma unroll
        for (int r = 0; r < ITS_ROWS; ++r) {
            if (read >> r & 1) {
                w[r] = weights_at(rows[r], s);
            }
        }
#pragma unroll
        for (int t = 0; t < BLOCK_TOKENS; ++t) {
            // Instead of tokens that are not there the last one.
            Inputs x = inputs_at(tokens + (size_t)min(t, count - 1) * TOKEN_BYTES, s);
#pragma unroll
            for (int r = 0; r < ITS_ROWS; ++r) {
                sum[t * ITS_ROWS + r] = added(w[r], x, s, sum[t * ITS_ROWS + r]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
#pragma unroll
        for (int v = 0; v < AT_A_TIME; ++v) {
            chains[(v * CHAINS + of.chain) * of.lanes + of.lane] = sum[k * AT_A_TIME + v];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        End end = end_at(of, k);
        int v = get_local_id(0) / of.lanes;
        out[k] = end.is ? of_chains(chains + v * CHAINS * of.lanes + end.lane, of.lanes) : 0.0f;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#endif
