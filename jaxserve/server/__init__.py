"""The HTTP server: OpenAI's API over an AsyncEngine.

Read app.py first (what is assembled, in which order), then one endpoint family, completions.py.
Nothing here runs tokenizers or templates on the event loop, trusts a client's numbers, or keeps
work going for a client that has left.
"""
