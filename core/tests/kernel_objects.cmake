# The kernels are compiled once per instruction set. A function that the linker may merge with one of the same name (an inline function of
# a header that was not inlined, a template) would exist once for AVX-512 and once for every machine, and the linker keeps the one it
# meets first: the library would then crash on processors without AVX-512. So no object of the kernels may define a weak function.
#
# cmake -DNM=nm -DOBJECTS=a.o;b.o -P kernel_objects.cmake
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${NM} cannot read ${object}")
  endif()
  if(NOT symbols MATCHES "kKernels")
    message(FATAL_ERROR "${object}: expected the kernels of an instruction set")
  endif()
  # W: a weak function. V is a weak object, such as the address of the exception handler. u: unique in the process, as static
  # variables of inline functions are.
  string(REGEX MATCHALL "[0-9a-f]+ [Wu] [^\n]+" weak "${symbols}")
  if(weak)
    list(JOIN weak "\n  " list)
    message(SEND_ERROR "${object}: define these always_inline, or in an unnamed namespace:\n  ${list}")
  endif()
endforeach()
