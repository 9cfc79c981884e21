"""Explanations of plans, for people: text (`text`) and one self-contained page (`html`).

schedule            a simple model of one tile's pipeline: who loads, multiplies, waits
svg                 the few SVG elements that the pictures are made of
memory_picture      shared memory and tensor memory, to scale
pipeline_picture    the schedule as a timeline
"""
