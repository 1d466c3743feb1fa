"""Jobs for the crash campaigns. Each is a module with two functions:

`main([folder, last step])` continues from what `folder` holds, trains to the last step and saves often. Each time something is
durable it says "kept <step>" on standard output. If the disk refuses a save, training goes on.

`check(folder, least) -> step` restores what `folder` holds into fresh objects and compares all of it with what must be there at
the restored step, which is not below `least`.
"""
