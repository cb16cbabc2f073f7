"""Tell what a policy learnt beside length: its gain at equal length, and a control that is paid for length alone."""
