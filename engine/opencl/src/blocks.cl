// Products of many tokens (BLOCKS). A work group computes a block: LANE_ROWS rows per lane times BLOCK_TOKENS tokens. 16
// work items share a lane, one for each chain, and each holds its chain of all products of the lane, so that every value
// read is used several times:
//
//   work item   chain item / lanes of lane item % lanes
//   row         r · lanes + lane within the group, 0 ≤ r < LANE_ROWS: neighbouring lanes have neighbouring rows
//   value       LANE_ROWS · t + r of a lane: row r times token t
//
// Chains are summed in local memory, VALUES_PER_ROUND values of all lanes per round, in the same order as by other variants.

#ifdef BLOCKS

#define VALUES (LANE_ROWS * BLOCK_TOKENS)
// Rounds: values that each work item sums.
#define ENDS (VALUES / VALUES_PER_ROUND)

// Position of a work item in its block.
typedef struct {
    int chain, lane, lanes;
} Member;

Member this_member(void) {
    Member member;
    member.lanes = get_local_size(0) / CHAINS;
    member.chain = get_local_id(0) / member.lanes;
    member.lane = get_local_id(0) % member.lanes;
    return member;
}

// Number of the lane's row `r` among all rows of the kernel.
int row_of(Member member, int r) {
    return (get_group_id(0) * LANE_ROWS + r) * member.lanes + member.lane;
}

// A value that a work item sums: row `r` of lane `lane`, token `t`; `is` is false if there is none.
typedef struct {
    int r, lane, t;
    bool is;
} End;

// The value of round `k`.
End end_at(Member member, int k) {
    End end;
    int item = get_local_id(0), value = k * VALUES_PER_ROUND + item / member.lanes;
    end.is = item < VALUES_PER_ROUND * member.lanes;
    end.lane = item % member.lanes;
    end.r = value % LANE_ROWS;
    end.t = value / LANE_ROWS;
    return end;
}

int end_row(Member member, End end) {
    member.lane = end.lane;
    return row_of(member, end.r);
}

// The sum of 16 chains of a lane, at a stride of `lanes`.
float sum_of_chains(__local const Chain *chains, int lanes) {
    Chain sum[CHAINS / 2];
#pragma unroll
    for (int j = 0; j < CHAINS / 2; ++j) {
        sum[j] = chains[j * lanes] + chains[(j + CHAINS / 2) * lanes];
    }
#pragma unroll
    for (int width = CHAINS / 4; width > 0; width /= 2) {
#pragma unroll
        for (int j = 0; j < width; ++j) {
            sum[j] += sum[j + width];
        }
    }
    return sum_of_lanes(sum[0]);
}

// Multiplies the lane's rows selected by the bits of `read` by `count` tokens; `out` receives the values that this work item
// sums. All work items of a group call it. Rows that are not selected are not read, and their values are undefined.
void products(const Row *rows, uint read, bytes tokens, int count, float *out, Member member,
              __local Chain *chains) {
    Chain sum[VALUES];
    Weights w[LANE_ROWS];
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
        sum[v] = no_sum();
    }
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
        w[r] = no_weights();
    }
    for (int s = member.chain; s < STEPS; s += CHAINS) {
#pragma unroll
        for (int r = 0; r < LANE_ROWS; ++r) {
            if (read >> r & 1) {
                w[r] = weights_at(rows[r], s);
            }
        }
#pragma unroll
        for (int t = 0; t < BLOCK_TOKENS; ++t) {
            // Missing tokens repeat the last one.
            Inputs x = inputs_at(tokens + (size_t)min(t, count - 1) * TOKEN_BYTES, s);
#pragma unroll
            for (int r = 0; r < LANE_ROWS; ++r) {
                sum[t * LANE_ROWS + r] = added(w[r], x, s, sum[t * LANE_ROWS + r]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
#pragma unroll
        for (int v = 0; v < VALUES_PER_ROUND; ++v) {
            chains[(v * CHAINS + member.chain) * member.lanes + member.lane] = sum[k * VALUES_PER_ROUND + v];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        End end = end_at(member, k);
        int v = get_local_id(0) / member.lanes;
        out[k] = end.is ? sum_of_chains(chains + v * CHAINS * member.lanes + end.lane, member.lanes) : 0.0f;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#endif
