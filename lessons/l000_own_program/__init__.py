"""What "Your own program" alone uses.

    masks  what causal_attention did to the attentions of a step, failed checks; a grader
"""
