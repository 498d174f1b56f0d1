"""Messages to tokens and back, engines, hinted prompts and teacher scores. It knows no trainer and
no endpoint.
"""
