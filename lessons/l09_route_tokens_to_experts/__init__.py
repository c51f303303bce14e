"""What "Route tokens to experts" alone uses.

    expert_slots  a grader: bytes as slots of each expert
    pictures      the experts of each token
"""
