"""Everything that measures jaxserve, and other servers by the same yardstick.

Read in this order: workload.py (what is asked, and when), metrics.py (what is counted), offline.py
and client.py (who asks: in process, or over HTTP), steps.py and occupancy.py (what the engine did
meanwhile: seen step by step, or told by a server's /metrics), serve.py and startup.py (what is
run), record.py (the JSON document of a measurement), report.py (pages and plots of such documents).

Nothing but the command line imports this room.
"""
