"""The colours of all pictures: Okabe and Ito's, which readers who cannot tell red from green can tell apart.

Blue computes; orange launches or communicates; red is a collective or a fault; grey is the rest, or before a change.
NAMES are for what a call names: the first five have no such role.
"""

BLUE, ORANGE, GREEN, YELLOW = "#0072b2", "#e69f00", "#009e73", "#f0e442"
SKY, RED, PINK, GREY = "#56b4e9", "#d55e00", "#cc79a7", "#999999"
LILAC = "#cbb8e8"
RANK_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, RED, GREY)
NAMES = (GREEN, YELLOW, LILAC, PINK, SKY, RED, BLUE, ORANGE)
INK, PAPER, FAINT = "#222222", "#ffffff", "#f1f3f5"
