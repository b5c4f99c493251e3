#define _GNU_SOURCE
#include "ending.h"
#include <stdint.h>

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef __GLIBC__

static struct {
    pid_t process;
    int (*end_mpi)(void); /* MPI_Finalize, or NULL */
    int least;            /* below zero unless the process leaves at once, with this status at least */
    unsigned limit;       /* seconds that MPI's end may take */
    volatile int status;  /* of a process that takes too long */
} end;

static void leave(int number)
{
    (void)number;
    _exit(end.status);
}

static void leave_after(unsigned seconds)
{
    sigset_t unblocked;
    sigemptyset(&unblocked);
    sigaddset(&unblocked, SIGALRM);
    signal(SIGALRM, leave);
    pthread_sigmask(SIG_UNBLOCK, &unblocked, NULL);
    alarm(seconds);
}

static void on_end(int status, void *none)
{
    (void)none;
    if (getpid() != end.process) return;
    end.status = status & 0xFF;
    if (end.end_mpi) {
        leave_after(end.limit);
        end.end_mpi();
        alarm(0);
        /* A launcher that sees a status other than 0 ends the other ranks, which may still write their files. */
        if (end.status) sleep(1);
    }
    if (end.least >= 0) {
        fflush(NULL);
        _exit(end.status ? end.status : end.least);
    }
}

static PyObject *py_at_exit(PyObject *module, PyObject *args)
{
    unsigned long long end_mpi;
    unsigned limit;
    int least, now;
    PyObject *kept;
    (void)module;
    if (!PyArg_ParseTuple(args, "KiIpO", &end_mpi, &least, &limit, &now, &kept)) return NULL;
    if (end.process != getpid() && on_exit(on_end, NULL)) return PyErr_Format(PyExc_OSError, "no room for a handler");
    Py_INCREF(kept);
    end.process = getpid();
    end.end_mpi = (int (*)(void))(uintptr_t)end_mpi;
    end.least = least;
    end.limit = limit;
    end.status = least < 0 ? 0 : least;
    if (now) leave_after(limit);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"at_exit", py_at_exit, METH_VARARGS,
     PyDoc_STR("at_exit(end_mpi, least, limit, now, kept): once Python has ended, call the function at an address other than 0, which may "
               "take `limit` seconds. Unless `least` is below 0, leave the process then, with its status, or `least` in place of 0. With "
               "`now`, they count from now. `kept` is never destroyed.")},
    {NULL, NULL, 0, NULL},
};

int add_ending(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}

#else

int add_ending(PyObject *module)
{
    (void)module;
    return 0;
}

#endif
