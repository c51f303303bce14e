"""Interactive views in JupyterLab, without a network: they follow the static pictures of `workbench.draw`.

Each is an anywidget whose saved state is a few lines; what it shows comes from the kernel when it asks.
"""

from workbench.widgets.graph import GraphView
from workbench.widgets.kernels import KernelView
from workbench.widgets.memory import MemoryView
from workbench.widgets.stepper import PassStepper
from workbench.widgets.timeline import TimelineView

__all__ = ["GraphView", "KernelView", "MemoryView", "PassStepper", "TimelineView"]
