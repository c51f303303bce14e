"""What "Bucket and overlap" alone uses.

    link_costs  the time of collectives, and the tokens that hide them; graders
"""
