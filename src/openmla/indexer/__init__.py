"""DSA's lightning indexer: scores of every key for every query, and the best keys of each.

    scores   score[t, s] = k_scale[s] * sum over heads of weights[t, h] * relu(q[t, h] . k[s])
    select   the topk largest of a row, in the order of their positions

This package has what the indexer's calls need before a plan: checks, windows, operands. From there
on scores and select are forms like dense, latent and sparse: openmla.dispatch plans and launches
them. Their kernels and plans are in openmla.kernels.<family>.indexer. What trains an indexer is in
the files of the same names after `loss_`.
"""
