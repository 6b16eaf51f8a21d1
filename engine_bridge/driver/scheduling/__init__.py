"""vLLM's scheduler with our order of starting: a policy decides once per step, and the queue hands out its decision.

vLLM asks its queue for one request after the other until its budget is used up. Our queue knows before each step which requests start in it, in which
order (`engine_bridge/policy/scheduling/queue_policy.py`), and otherwise says that it is empty.
"""
