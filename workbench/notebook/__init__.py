"""Pictures, views and magics for notebooks.

    draw              static pictures and tables
    magics            %%ranks and %ranks
    moments           the base of views that change something, and work in a saved page
    replay_rehearsal  a stand-in for CUDA graphs on a CPU, for lessons and tests
    show              `show`: picture and view of any object
    views             interactive views
"""
