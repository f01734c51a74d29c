"""What launch/report.py is made of: data (read), curves (draw), parts (blocks of a page), one, many, sweeps (what a page says), page."""
