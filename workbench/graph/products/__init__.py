"""Matrix products: those beside collectives, those of linear layers, and both rewritten.

    beside_collectives  tensor-parallel collectives beside matrix products
    float8              linear layers' products as scaled products of float8
    float8_gathers      weights gathered in float8, with scales that all ranks agree on
    fuse                a collective and its products in one operator
    linear              which of a graph's products belong to linear layers
"""
