"""Pictures, views and magics for notebooks.

    draw        static pictures and tables
    graph_diff  nodes that a pass added, removed, moved, changed
    magics      %%ranks and %ranks
    show        `show`: picture and view of any object
    views       interactive views
"""
