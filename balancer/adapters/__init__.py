"""Takes users' own batch types apart into columns and puts them together again (paper, section 3.1).

adapt.py chooses how: structure.py goes through dicts, tuples and dataclasses, leaves.py and keyed.py through what holds
samples. device.py moves a batch of any type to a device.
"""
