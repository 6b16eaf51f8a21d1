"""One small file for each agent framework, with one function: ``attach(what the framework runs, advisor)``.

A framework is imported when its `attach` is called, never before. Each tells the advisor which agents start and end, adds the edges that the
framework knows beforehand, and, where the framework lets it, names each agent's session in its requests.
"""
