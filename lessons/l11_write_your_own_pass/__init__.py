"""What "Write your own pass" alone uses.

    first_wrong  a grader: the first node whose value is wrong
    propose      a contract from a pass's first run
"""
