"""What a run reports about itself: status lines, `summary.json`, `report.html`, the metrics file.
It only reads.
"""
