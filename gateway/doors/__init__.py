"""Where clients come in: each door reads its protocol, asks the rooms below and writes the answer."""
