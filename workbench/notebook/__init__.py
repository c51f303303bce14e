"""Pictures, views and magics for notebooks.

    draw        static pictures and tables
    graph_diff  nodes that a pass added, removed, moved, changed
    magics      %%ranks and %ranks
    moments     the base of views that change something, and work in a saved page
    show        `show`: picture and view of any object
    views       interactive views
"""
