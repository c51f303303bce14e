"""Pictures, views and magics for notebooks.

    draw     static pictures and tables
    magics   %%ranks and %ranks
    moments  the base of views that change something, and work in a saved page
    show     `show`: picture and view of any object
    views    interactive views
"""
