"""What "Compile regions" alone uses.

    bits      whether a compiled region gives the bits of the graph without it; figures of an answer
    parts     small functions with regions, and the parts that Inductor gets; figures of an answer
    recorded  steps with compiled regions that were measured on GPUs
"""
