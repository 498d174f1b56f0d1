"""What a run says of itself: status lines, `summary.json`, `report.html`, the metrics file. It only
reads.
"""
