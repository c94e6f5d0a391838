"""The PTX that nvcc makes of the kernels, run without a GPU: all threads of a launch at once, in numpy.

    text ─parse▶ Kernel ─Machine▶ registers, memory.py: bounds, races ─▶ counted instructions

Semantics follow NVIDIA's PTX ISA manual; only the instructions that the kernels are made of exist here.
"""
