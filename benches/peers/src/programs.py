def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def run_fib(n):
    return fib(n)


def run_mandelbrot(n):
    total = 0
    for y in range(n):
        ci = 2 * y / n - 1
        for x in range(n):
            cr = 2 * x / n - 1.5
            zr = zi = 0.0
            i = 0
            while i < 100 and zr * zr + zi * zi < 4:
                zr, zi = zr * zr - zi * zi + cr, 2 * zr * zi + ci
                i += 1
            total += i
    return total


def run_table(n):
    table = {}
    for i in range(n):
        key = i % 5000 * 1009
        table[key] = table.get(key, 0) + i
    return sum(table.values())


def run_host(n):
    total = 0
    for i in range(n):
        total = host_add(total, i)
    return total
