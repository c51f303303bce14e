"""Interactive views in JupyterLab, without a network, for the static pictures of `workbench.notebook.draw`.

Each is an anywidget. The timeline and the memory hold their data, and work in a saved page; the state of the others is
a few lines, and they ask the kernel for their contents.

    boxes       boxes and links of a graph with some modules open
    controls    a view's controls, from ipywidgets
    graph       the graph as boxes that open
    graph_tree  a graph as a tree of modules
    kernels     generated code beside its nodes
    lineage     a node through every pass
    memory      live bytes, to zoom into
    node_facts  all that a graph knows of one node
    page        what makes views with data of their own work in a saved page
    placement   placements that a graph implies
    stepper     a slider over the passes
    timeline    a step over time, to zoom into
    view        the base of the views that ask the kernel
"""

from workbench.notebook.views.graph import GraphView
from workbench.notebook.views.kernels import KernelView
from workbench.notebook.views.memory import MemoryView
from workbench.notebook.views.stepper import PassStepper
from workbench.notebook.views.timeline import TimelineView

__all__ = ["GraphView", "KernelView", "MemoryView", "PassStepper", "TimelineView"]
