"""What both interpreters share: numbers, global memory, schedules, faults and the report."""
