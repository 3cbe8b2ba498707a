"""Decides which rank trains on which sample (paper, section 4.1).

partition.py and variable.py plan; constraints.py wraps a planner in budgets, groups and keys; cost.py and speeds.py
learn what samples cost and how fast ranks are.
"""
