// Products of a row with tokens. The host defines TILE, the maximum tokens per work item, which share each read of a row, and
//
//   LOCAL_TEAMS      16 work items per row, one for each chain; they sum the chains in local memory
//
// Without LOCAL_TEAMS a work item computes a row. In tiles neighbouring work items have neighbouring rows; otherwise they
// have the chains of one row. All variants sum chains in the same order: halves, quarters, and so on.

#ifndef BLOCKS
// Position of a work item: its chain, and its row within the work group.
typedef struct {
    int chain, row;
} Member;

Member this_member(void) {
    Member member;
    int item = get_local_id(0);
#if !defined(LOCAL_TEAMS)
    member.chain = 0;
    member.row = item;
#elif defined(TILES)
    int rows = get_local_size(0) / CHAINS;
    member.chain = item / rows;
    member.row = item % rows;
#else
    member.chain = item % CHAINS;
    member.row = item / CHAINS;
#endif
    return member;
}

// Number of the work item's row among all rows of the kernel.
int row_of(Member member) {
#ifdef LOCAL_TEAMS
    return get_group_id(0) * (get_local_size(0) / CHAINS) + member.row;
#else
    return get_global_id(0);
#endif
}

#if defined(LOCAL_TEAMS)
// Local memory: 16 chains for each row and token of the group, and their sums.
#define LOCAL_PARAMS , __local Chain *chains, __local float *totals
#define LOCAL_ARGS , chains, totals

// The sum of 16 chains.
float sum_of_chains(__local Chain *chains) {
    Chain sum[CHAINS / 2];
    for (int j = 0; j < CHAINS / 2; ++j) {
        sum[j] = chains[j] + chains[j + CHAINS / 2];
    }
    for (int width = CHAINS / 4; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            sum[j] += sum[j + width];
        }
    }
    return sum_of_lanes(sum[0]);
}
#else
#define LOCAL_PARAMS
#define LOCAL_ARGS
#endif

#ifdef LOCAL_TEAMS
// A row times the tokens selected by the bits of `wanted`. All work items of a group call it.
void products(Row row, bytes tokens, int count, uint wanted, float *out, Member member LOCAL_PARAMS) {
    Chain sum[TILE];
    for (int t = 0; t < TILE; ++t) {
        sum[t] = no_sum();
    }
    if (popcount(wanted) > 1) {
        for (int s = member.chain; s < STEPS; s += CHAINS) {
            Weights w = weights_at(row, s);
            for (int t = 0; t < count; ++t) {
                sum[t] = added(w, inputs_at(tokens + (size_t)t * TOKEN_BYTES, s), s, sum[t]);
            }
        }
    } else if (wanted) {
        int t = 31 - clz(wanted);
        Chain chain = no_sum();
        for (int s = member.chain; s < STEPS; s += CHAINS) {
            Inputs x = inputs_at(tokens + (size_t)t * TOKEN_BYTES, s);
            chain = added(weights_at(row, s), x, s, chain);
        }
        sum[t] = chain;
    }
    for (int t = 0; t < count; ++t) {
        chains[(member.row * TILE + t) * CHAINS + member.chain] = sum[t];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (member.chain < count) {
        int i = member.row * TILE + member.chain;
        totals[i] = sum_of_chains(chains + i * CHAINS);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int t = 0; t < count; ++t) {
        out[t] = totals[member.row * TILE + t];
    }
}
#else
// The sum of a token's chains.
float sum_of_chains(Chain *sum) {
    for (int width = CHAINS / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            sum[j] += sum[j + width];
        }
    }
    return sum_of_lanes(sum[0]);
}

// A row times a token.
float product(Row row, bytes token) {
    Chain sum[CHAINS];
    for (int j = 0; j < CHAINS; ++j) {
        sum[j] = no_sum();
    }
    for (int first = 0; first < STEPS; first += CHAINS) {
        int here = min(CHAINS, STEPS - first);
        for (int j = 0; j < here; ++j) {
            Inputs x = inputs_at(token, first + j);
            sum[j] = added(weights_at(row, first + j), x, first + j, sum[j]);
        }
    }
    return sum_of_chains(sum);
}

// A row times `count` tokens, at most TILE.
void tile(Row row, bytes tokens, int count, float *out) {
    Chain sum[TILE][CHAINS];
    for (int t = 0; t < TILE; ++t) {
        for (int j = 0; j < CHAINS; ++j) {
            sum[t][j] = no_sum();
        }
    }
    for (int first = 0; first < STEPS; first += CHAINS) {
        int here = min(CHAINS, STEPS - first);
        for (int j = 0; j < here; ++j) {
            Weights w = weights_at(row, first + j);
            for (int t = 0; t < count; ++t) {
                Inputs x = inputs_at(tokens + (size_t)t * TOKEN_BYTES, first + j);
                sum[t][j] = added(w, x, first + j, sum[t][j]);
            }
        }
    }
    for (int t = 0; t < count; ++t) {
        out[t] = sum_of_chains(sum[t]);
    }
}

// A row times the tokens selected by the bits of `wanted`.
void products(Row row, bytes tokens, int count, uint wanted, float *out, Member member) {
    if (popcount(wanted) > 1) {
        tile(row, tokens, count, out);
    } else if (wanted) {
        int t = 31 - clz(wanted);
        out[t] = product(row, tokens + (size_t)t * TOKEN_BYTES);
    }
}
#endif
#endif
