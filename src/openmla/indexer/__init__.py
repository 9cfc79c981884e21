"""DSA's lightning indexer: scores of every key for every query, and the best keys of each.

    scores   score[t, s] = k_scale[s] * sum over heads of weights[t, h] * relu(q[t, h] . k[s])
    select   the topk largest of a row, in the order of their positions

The same flow as attention has: api -> checks -> ops -> operands -> problem -> plan -> kernel.
Kernels are in openmla.kernels.<family>.indexer, their plans in openmla.planning.<family>.indexer.
"""
