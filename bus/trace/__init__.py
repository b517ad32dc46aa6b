"""Where the time of a run's steps goes, from the journals of its processes.

`timeline` finds the spans of each step in the journals, `coverage` what of a step's time they account for, `chrome`
writes them in the trace event format that Perfetto and Chrome open, and `command` is ``rankbus trace``.
"""
