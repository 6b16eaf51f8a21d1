"""The text of documents that people put to a message: PDF, Word, Excel, HTML and CSV.

A document is read in a process of its own with bounds on its time and memory (`worker.py`, started by `reader.py`): the libraries that read these
formats fail in many ways, and a small file may describe a huge one. Nothing of a document is stored; its text goes into a message as any text.
"""
