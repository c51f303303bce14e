"""The devices that the cost model simulates, by data sheet or as measured, and measuring them.

    estimators  a device's figures, given to Inductor's estimators
    profile     a measured machine: its file, and times interpolated from it
    specs       data sheets, and times by them
    timing      time one operator on this machine

Profiles of measured machines lie in the folder `machines`.
"""
