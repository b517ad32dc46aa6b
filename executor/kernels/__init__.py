"""Matrix products and attention written for a CPU (`cpu.cc`), compiled for the one at hand, called from XLA programs.

XLA's own products pack a weight anew at every call, which costs more than the product itself when a step has few
tokens, and its attention copies blocks before it reads them. Here a weight is packed once, when it is loaded, and a
block is read where it lies. Everything is float32.

Where there is no C++ compiler all of this is left out: weights stay as they are, and products and attention are XLA's.
"""
