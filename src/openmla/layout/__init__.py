"""Address maps as data: swizzles, LDS slots, bank conflicts. Pure integers: no torch, no GPU.

`cdna4_lds` is the door to the CDNA4 maps, `banks` counts conflicts of any map, `shared_bases` turns
maps into compiler layouts, `cdna4_proof` checks them by enumeration, `bank_picture` draws them.
"""
