begin:
    b failed
