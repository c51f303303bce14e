"""What "Bucket and overlap" uses; lessons 14 and 16 draw bars with `stacked`, too.

    bucket_by_hand    concatenate shards, gather once, split
    collective_order  move a collective's start and wait; its grader
    layers            small models under FSDP on two ranks
    link_costs        the time of collectives, and the tokens that hide them; a grader
    replayed_steps    measured on two GPUs, beside the simulation
    stacked           bars of milliseconds by kind
"""
