"""The devices that the cost model simulates, by data sheet or as measured, and measuring them.

    estimators  a device's figures, given to Inductor's estimators
    machines    profiles of measured machines, as JSON
    profile     a measured machine: its file, and times interpolated from it
    specs       data sheets, and times by them
    timing      time one operator on this machine
"""
