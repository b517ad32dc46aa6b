"""The journal: every event of a process in its one total order, with what its core answered, on disk.

`recorder` is what the shell calls for each event; `writer` compresses and writes on a thread of its own; `blocks` is
how records lie in a file and `records` what is in them; `reader` reads them back, however damaged the file is.
"""
