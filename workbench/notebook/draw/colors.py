"""The colours of all pictures: Okabe and Ito's, which readers who cannot tell red from green can tell apart."""

BLUE, ORANGE, GREEN, YELLOW = "#0072b2", "#e69f00", "#009e73", "#f0e442"
SKY, RED, PINK, GREY = "#56b4e9", "#d55e00", "#cc79a7", "#999999"
RANK_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, RED, GREY)
INK, PAPER, FAINT = "#222222", "#ffffff", "#f1f3f5"
