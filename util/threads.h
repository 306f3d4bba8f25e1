// threads.h: OpenMP where it is there, one thread where it is not.
#ifndef SEQ_UTIL_THREADS_H
#define SEQ_UTIL_THREADS_H

#include <stddef.h>
#ifdef _OPENMP
#include <omp.h>
#define OPENMP_WORD "OpenMP on"
#else
#define OPENMP_WORD "OpenMP off"
#endif

// threads_set: use n threads from now on; 0: what OpenMP would take, all cores, at most 1024.
static inline void threads_set(int n)
{
#ifdef _OPENMP
    int all = omp_get_max_threads();
    omp_set_num_threads(n > 0 ? n : all < 1024 ? all : 1024);
#else
    (void)n;
#endif
}

// threads_count: threads a parallel region will have.
static inline size_t threads_count(void)
{
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

// threads_index: number of the calling thread within its region.
static inline size_t threads_index(void)
{
#ifdef _OPENMP
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

#endif
