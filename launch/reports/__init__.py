"""Build the page of launch/report.py.

run_files reads run directories; run_page, many and sweeps build a Page; html_page renders it.
"""
