"""vLLM's scheduler with our order of starting: a policy decides once per step, the queue hands out what it decided.

vLLM asks its queue for one request after the other until its budget is used up. Ours knows before each step who starts in it, in which order
(`engine_bridge/policy/scheduling/queue_policy.py`), and otherwise says that there is nobody.
"""
