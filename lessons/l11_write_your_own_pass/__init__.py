"""What "Write your own pass" alone uses.

    copies       the copies before a reduce-scatter: which tokens they hand out, which there are, what one costs
    scaled       a step of ten operators, and one pass on it with values
    tied         the museum's model, whose output weight is its embedding
"""
