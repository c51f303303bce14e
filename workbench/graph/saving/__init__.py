"""What the forward keeps for the backward, and what the backward computes again.

    choose       the plan that repeats least within a budget
    partitioner  what torch's own partitioner would save
    peak         the step's peak, predicted
    plan         MemoryPlan: each tensor, its bytes, the choice and its price
    solver       the choice as an integer program
    values       the tensors of a joint graph that the backward can read, and what computes them
"""
