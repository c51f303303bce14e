"""Devices: those that the cost model simulates, measuring them, and what a CPU emulates or a host holds.

    float8       scaled products on a CPU
    host_copies  copies to pinned host memory and back, as operators
    profile      a measured machine: its file, and times interpolated from it
    specs        data sheets, and times by them

Profiles of measured machines lie in the folder `machines`.
"""
