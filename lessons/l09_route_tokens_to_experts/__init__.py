"""What "Route tokens to experts" uses; lesson 11 draws `slots`, too.

    expert_slots  a grader: bytes as slots of each expert
    load_picture  tokens for each expert, step by step
    pictures      the experts of each token, the slots that travel, the all-to-alls of a step
    slots         slots, and the tokens in them
    small_runs    the trained model, and recorded steps
"""
