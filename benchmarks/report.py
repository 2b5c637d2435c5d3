def add_arguments(p):
    pass


def main(p, o):
    return 0
